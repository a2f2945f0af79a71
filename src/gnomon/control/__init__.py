"""Who trains when processes of one job are lost, come, or are slow: controllers, their traces and their simulation.

A controller is a pure function of a plan and of what is seen. The launchers of the runtime and the simulators of
`fleet` call the same ones. Leaves out noticing and starting processes (`runtime`), and many jobs (`fleet`).
"""

from gnomon.control.controllers import CONTROLLERS as CONTROLLERS
from gnomon.control.controllers import Controller as Controller
from gnomon.control.controllers import surplus as surplus
from gnomon.control.seen import AfterLoss as AfterLoss
from gnomon.control.seen import Decision as Decision
from gnomon.control.seen import JobProcesses as JobProcesses
from gnomon.control.simulated import Incident as Incident
from gnomon.control.simulated import SimulatedLauncher as SimulatedLauncher
from gnomon.control.simulated import replayed as replayed
from gnomon.control.trace import ControlTrace as ControlTrace
from gnomon.control.trace import Look as Look
from gnomon.control.trace import Recorder as Recorder
from gnomon.control.trace import read_trace as read_trace
