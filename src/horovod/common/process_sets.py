"""The old module of process sets: `hora.torch.process_sets`."""

from hora.torch.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
