"""What is wrong with a run, in words: rules over what it measured, while it trains and afterwards."""

from gnomon.diagnosis.diagnose import diagnose
from gnomon.diagnosis.finding import Finding, Sample

__all__ = ["Finding", "Sample", "diagnose"]
