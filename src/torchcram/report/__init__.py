"""Results for people to look at: tables, pictures, pages."""
