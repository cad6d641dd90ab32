"""What a service tells of itself: metrics, spans, request logs, views of the fleet."""
