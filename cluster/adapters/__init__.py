"""LoRA adapters of a fleet: which there are, and how every worker comes to have them."""
