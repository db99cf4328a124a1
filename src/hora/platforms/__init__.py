"""The environment of each platform that starts processes: one file for the variables of one platform.

A *platform* is the program that has started this process: torchrun, Open MPI's or MPICH's mpirun, Slurm's srun,
Kubeflow, or Hora itself. The file of a platform reads its variables and no others:

- `detect(env)` returns the `World` of a rank, or None if the platform has not started this process as a rank;
- `node(env, hostname)` returns the `Node` on which the command runs once, for `--join`, or None;
- further facts about a scheduler's job, such as its hosts.

`detect.py` has the lists of the platforms, in order of precedence. Nothing here opens a connection.
"""
