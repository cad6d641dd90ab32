"""Who may use the service: keys, certificates, the secret of the data plane."""
