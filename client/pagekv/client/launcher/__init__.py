"""Local processes of pagekv up and pagekv demo: started, watched, stopped."""
