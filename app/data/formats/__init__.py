"""What a row means, one module a shape; `table` knows them all."""
