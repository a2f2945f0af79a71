"""Many jobs on one cluster: traces, forecasts of each job on each allocation, policies, replay, and a live controller.

The middle is pure: a trace, machines, a policy and forecasts go in, a `Result` comes out, with every device-second
accounted for. Policies are functions of a state and forecasts, the same in the replay and in the controller. Leaves out
placing inference requests, and training itself.
"""
