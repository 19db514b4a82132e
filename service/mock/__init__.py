"""The decode-iteration model, and a mock vLLM server around it."""
