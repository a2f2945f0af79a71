"""Reports: predictions and measured runs beside them, as plain text for 80 columns.

Each module turns values of the rooms above into text, or into summaries that print and serialise alike. Leaves out
printing itself, colour and files (`cli`).
"""

from gnomon.report.prediction import prediction_text as prediction_text
from gnomon.report.tables import Column as Column
from gnomon.report.tables import table as table
from gnomon.report.tables import wrapped as wrapped
