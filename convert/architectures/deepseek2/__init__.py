"""DeepSeek V2, V2.5, V3, V3.1, R1 and their derivatives as llama.cpp's `deepseek2`.

options   what the user may choose: the layout of attention, whether MTP layers are kept
config    what config.json says, checked and complete
places    where in the model a rule applies
rules     which weights become which tensors, and which are left out
metadata  the keys deepseek2.*, written and read back
notes     what to know before running the file
family    all of them together
"""
