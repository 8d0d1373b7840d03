"""Speed and error of chunk_kda on a GPU, one script a question; README.md tells how to repeat the numbers."""
