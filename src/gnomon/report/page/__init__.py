"""A report as one HTML page that needs nothing else: no network, no other file, no framework.

`page_data(timelines, …)` gathers what is shown as plain values; `page_html(data)` puts it into the template with its
style and script. Leaves out writing the file.
"""

from gnomon.report.page.data import page_data as page_data
from gnomon.report.page.html import page_html as page_html
