"""What is asked: shapes, values, memory layouts, and the tensors made from them."""
