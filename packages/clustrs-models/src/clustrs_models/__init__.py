"""Small vision-language models, one folder each in the format of the model hub, and the photographs of a task.

Data only: `clustrs.embedded` says which models there are, and finds them here. The version is that of the data. It is
not the version of `clustrs`, whose extra `models` names the versions that fit: what changes answers makes a new minor
version, what leaves them as they are a new patch version.
"""

__version__ = "0.1.0"
