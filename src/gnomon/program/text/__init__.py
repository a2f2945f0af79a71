"""The text form of a Program: `parse_program(text)` and `print_program(program)`, which undo each other exactly.

    gnomon.program/1
    stages 2
    units 2                                  # or, one a line:  unit 0 = 0:0:4 1:0:2 weight 0.5 worker 1
    class 0 count 8
      0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0AR 0OPT
    class 1
      1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 (1F1&1W0) 1B1 1SEND_B1 1OPT@host{read G 1, write P 1}

Header lines give only what differs from the standard kinds, buffers and communicators: `chains`, `inputs loaded`,
`buffer`, `pool`, `kind`, `comm`, `alias` (`Header.FORMS` lists their forms; `kinds only` and `buffers only` leave the
standard ones out). `class I [count N] [stage S]` opens a class; rows may leave out a stage given there, or that of
class i where the Program has as many stages as classes. A row is stage, kind, unit, then `>peer` `/name` `@stream`
`:comm` `#group` `!` `{effects}`; `#` before a blank starts a comment. Reading is strict: anything unknown, repeated or
out of range is a FormatError with line and column. Left out: whether the Program can run (`validate`), and durations.
"""

from gnomon.program.text.read import parse_program
from gnomon.program.text.words import MAX_BYTES, VERSION
from gnomon.program.text.write import print_program

__all__ = ["MAX_BYTES", "VERSION", "parse_program", "print_program"]
