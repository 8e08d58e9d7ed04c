"""`serve-llm convert`: a checkpoint of pytorch_model*.bin files as safetensors."""
