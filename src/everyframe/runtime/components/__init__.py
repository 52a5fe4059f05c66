"""Components of a model: their files, their build without values, and those that stay in memory."""
