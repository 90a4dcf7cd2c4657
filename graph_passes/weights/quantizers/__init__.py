"""How weights are rounded: functions on numpy arrays that know nothing of graphs. One method a module."""
