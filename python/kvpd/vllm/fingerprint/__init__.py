"""What decides the values in a KV cache, in place of the name a model was loaded by.

`configuration` lists the fields of a model's configuration that K and V depend on; `checkpoint`
finds the files that weights were loaded from; `weights` samples them. None needs vLLM.
"""
