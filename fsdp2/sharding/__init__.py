"""WHERE bytes live: meshes, layouts, packing and DTensor specs."""
