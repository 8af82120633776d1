"""What is saved and how: state → plan → staging → writer → manifest → commit → retention, and back."""
