"""The workers as one fleet: who takes a request, the streams that carry it, and what happens when a worker is lost."""
