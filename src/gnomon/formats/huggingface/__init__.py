"""Models' own `config.json` files of the Hugging Face hub, by `huggingface.read`.

They are models, given as MODEL or `--model`, and no job files: the folder holds no `Format`. `runnable` is what the
runtime executes, `weights` where its tensors lie, `safetensors` how files of them begin. Leaves out tokenizers.
"""
