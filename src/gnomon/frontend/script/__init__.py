"""A training script of the user's, run unmodified up to its first step, in a process of its own.

`python -m gnomon.frontend.script ANSWER DEVICES SCRIPT [ARGUMENTS]` runs it (`__main__`): parameters have no memory
(`machine`), models and data of the Hugging Face hub that are not on this machine are stood in for (`hub`), and the run
ends at `Trainer.train()` or the first `optimizer.step()` (`step`). ANSWER is written (`answer`): what was found, as
JSON. Leaves out starting the process and what the answer means (`cli.script`).
"""
