"""Evaluation metrics, class reports and segmentation overlays."""
