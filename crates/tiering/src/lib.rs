//! The pure rules of tiering: window, boundary, coverage, routes, pending set, admission.
