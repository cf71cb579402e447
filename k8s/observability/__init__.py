"""Recording rules, alerts and dashboards as typed values, and their writer."""
