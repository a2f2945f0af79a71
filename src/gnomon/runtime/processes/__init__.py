"""The processes of a job: started on this machine or by the user's own launcher, and what the failure of one means.

They are given a function and end together. Leaves out what they train (`runtime.launch`).
"""
