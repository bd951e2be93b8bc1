"""Small vision-language models, one folder each in the format of the model hub, and the tasks that measure them.

`clustrs.embedded` lists the models and finds them here. The modules `scenes` and `photographs` are the tasks `scenes`
and `photos` (entry points of the group `clustrs.tasks`). What changes answers or questions makes a new
minor version, what leaves them as they are a new patch version.
"""

__version__ = "0.2.0"
