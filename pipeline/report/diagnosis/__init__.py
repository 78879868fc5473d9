"""Diagnosis by rule: what a run's own numbers say about its health, with evidence, threshold and what to try."""

from pipeline.report.diagnosis.finding import Finding
from pipeline.report.diagnosis.section import diagnose, diagnosis_text

__all__ = ["Finding", "diagnose", "diagnosis_text"]
