"""Segmentation of images and volumes: datasets, losses and U-Nets."""
