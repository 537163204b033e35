"""A class for every pixel or voxel: images and volumes with masks."""
