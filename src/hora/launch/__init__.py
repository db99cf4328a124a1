"""Launching: from what the user says to processes that run as ranks.

- A *job* (`job`) is a program, a command or a function, and the *slots* on which it runs: places for a process on a
  host.
- A *worker* (`worker`) is a process of the job. It keeps its number for life. Its *rank* is its place in a *world*, the
  workers that train together; an elastic job forms a new world, a *generation*, when workers come or go.
- A *node* or *host* is a machine. Each has an *agent* (`agent/`), which starts workers there, forwards their output and
  ends them. A *provider* (`providers/`) knows how to start an agent: over ssh, in a Slurm allocation, and so on.
- The *launcher* is the process that the user has started. Its *controller* (`controller/`) asks a *policy*, pure
  functions, what to do after every event, and tells the agents.
- The *rendezvous* (`hora.net.rendezvous`) is the server in the launcher where workers meet and report.

`start` runs a job: serve, have the provider start the agents, run the controller, close. `run` is `hora.run`.
"""
