from hora.ray.strategy import BaseStrategy, ColocatedStrategy, PGStrategy, create_placement_group

__all__ = ["BaseStrategy", "ColocatedStrategy", "PGStrategy", "create_placement_group"]
