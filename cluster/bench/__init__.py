"""`raycomb bench`: loads, how long they took, and a picture of it."""
