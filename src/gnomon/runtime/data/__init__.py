"""Data: text, conversations and tokens in the formats that people have them in, as the batches of a training run.

`Corpus.open(Source(path=…, tokenizer=…))` is the whole of it: `batch(step)` is a function of seed and step only.
Leaves out pictures and sound.
"""

from gnomon.runtime.data.corpus import Corpus as Corpus
from gnomon.runtime.data.encode import BYTES as BYTES
from gnomon.runtime.data.encode import Encoder as Encoder
from gnomon.runtime.data.megatron import Tokens as Tokens
from gnomon.runtime.data.megatron import Writer as Writer
from gnomon.runtime.data.store import Source as Source
from gnomon.runtime.data.store import store as store
