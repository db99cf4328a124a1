"""Networking: every connection between processes of a job, authenticated and encrypted.

- A *connection* (`wire`) begins with a handshake of the Noise protocol (`noise`), keyed by *credentials*: a secret, the
  purpose of the connection, and the number of the worker or rank that owns the key (`keys`). Then it carries *frames*.
- A *message* is a header, a JSON object, and a payload of bytes. `messages` turns named tuples into messages.
- A *server* (`server`) has one thread for all its *peers*, the other ends of its connections. `acceptor` accepts
  connections, with one set of limits for all servers of a process.
- A *session* (`session`) outlives its connection: after a break the client reconnects, and no message is lost.
- The *key-value store* (`key_value_store`) is where ranks exchange addresses; the *rendezvous* (`rendezvous`) extends
  it for the workers of a job, with the *requests* of `requests`. `client` is the workers' end of both.
- `sockets` knows addresses and options of the kernel.

Nothing from the network is unpickled, or parsed as more than JSON, before its sender is authenticated.
"""
