"""`program.rows` under the name by which files of methods know it.

To be removed with the last of these imports; leaves out everything else.
"""

from gnomon.program.rows import KIND as KIND
from gnomon.program.rows import Inserted as Inserted
from gnomon.program.rows import Ints as Ints
from gnomon.program.rows import Longs as Longs
from gnomon.program.rows import Rows as Rows
from gnomon.program.rows import by_time as by_time
from gnomon.program.rows import check_counts as check_counts
from gnomon.program.rows import insert as insert
from gnomon.program.rows import of_lists as of_lists
from gnomon.program.rows import of_table as of_table
from gnomon.program.rows import repeated as repeated
