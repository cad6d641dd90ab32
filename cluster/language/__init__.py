"""A model's text side: tokens to text and back, templates, stop strings, thoughts and calls of tools."""
