"""From a validated body to an answer that grows: prompts, requests, choices."""
