"""The types that ik_llama.cpp alone has."""
