"""The paper's studies as a library: each module has a frozen config and `run(config) -> StudyResult`.

from clustrs.studies import stability

result = stability.run(stability.StabilityConfig(keep=16, count=10))
print(result.findings)
result.save("out/stability")
"""

from clustrs.studies.result import StudyPart, StudyResult

__all__ = ["StudyPart", "StudyResult"]
