"""GLM-4.7-Flash: DeepSeek V3's tensors and keys with GLM's tokenizer and MTP layer, as `deepseek2`."""
