"""Options of `gnomon compress`.

Leaves out reading and writing weights (`runtime.checkpoint.compress`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.cli.options.flags import Options, option, positional, switch
from gnomon.cli.values import at_most, some

METHODS = ("rtn", "gptq", "awq", "magnitude", "wanda", "admm")


@dataclass(frozen=True, kw_only=True)
class CompressOptions(Options):
    """A folder, how its linears are to be stored, and text to see what that costs."""

    about = """\
Writes a new folder with the linears of layers in 4 or 8 bits, eight-bit floats
or ternary (as compressed-tensors has them) or sparse (plain tensors with
zeros). Embeddings, head, norms, biases and routers stay as they are. --data is
text: a quarter is held out, and the loss on it is printed before and after;
gptq, awq, wanda and admm read the inputs that the rest gives each linear.
Errors are printed by tensor and by layer. Needs torch.

examples:
  gnomon compress path/to/hf_folder --bits 4 --data corpus.jsonl -o out
  gnomon compress path/to/hf_folder --bits 4 --method gptq --data corpus.jsonl \\
      -o out
  gnomon compress path/to/hf_folder --sparsity 2:4 --method wanda \\
      --data corpus.jsonl -o out"""

    folder: str = positional(metavar="FOLDER", help="config.json and *.safetensors")
    output: str = option("-o", "--output", required=True, read=some, metavar="OUT", help="folder that is made")
    bits: str | None = option("--bits", choices=("4", "8", "fp8", "ternary"), help="of a weight")
    group: int | None = option(
        "--group", read=at_most(1 << 20, least=0), metavar="N", help="weights that share a scale; 64; 0: a whole row"
    )
    sparsity: str | None = option(
        "--sparsity", read=some, metavar="FORM", help="2:4, 4:16, 0.9 (zeros), block:16x16:0.9"
    )
    method: str | None = option(
        "--method", choices=METHODS, help="rtn (default), gptq, awq with --bits; magnitude (default), wanda, admm"
    )
    data: str | None = option("--data", read=some, metavar="PATH", help="text: JSONL, Parquet, files; as gnomon run")
    tokenizer: str | None = option("--tokenizer", read=some, metavar="FILE", help="default the folder's own, or bytes")
    json: bool = switch("--json", help="for programs")
