"""What is written in C++: compiled with the package where there is a compiler."""
