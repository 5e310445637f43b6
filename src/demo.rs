//! What `halocline demo` shows: a shop's year of orders, two replica sets to keep them in, the daemon
//! between them, and clients whose every answer is checked. The verb that tells the story is in
//! `cli/demo.rs`; nothing here is used by the daemon itself.

pub mod compare;
pub mod live;
pub mod orders;
pub mod shop;
pub mod stage;
pub mod summary;
pub mod traffic;

/// The database of the sample orders.
pub const DATABASE: &str = "shop";
/// Their collection.
pub const COLLECTION: &str = "orders";
/// The field with an order's date.
pub const DATE_FIELD: &str = "created_at";
/// How long an order stays on the fast tier.
pub const KEEP: std::time::Duration = std::time::Duration::from_secs(30 * 24 * 60 * 60);
