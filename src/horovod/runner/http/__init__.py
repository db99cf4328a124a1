"""Old import paths of the rendezvous."""
