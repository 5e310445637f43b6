//! One shop's own books: what every acknowledged write should have left behind, so that each answer
//! can be checked exactly. Talks to no server.

use std::collections::{BTreeMap, HashSet, VecDeque};

use bson::oid::ObjectId;
use bson::raw::RawDocumentBuf;

use super::orders::{Order, Year};

/// Deleted orders that are asked for again.
const GONE_REMEMBERED: usize = 200;

/// Where an order stands: by date, as the shops look them up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Milliseconds since 1970.
    pub created: i64,
    /// The order's `_id`.
    pub id: ObjectId,
}

/// What the shop knows of one order.
#[derive(Debug)]
enum Entry {
    /// As the sample year has it.
    Sample(u64),
    /// Made or changed since.
    Changed(Box<Order>),
}

/// A shop's books. One client keeps them, one operation at a time, so they are exact.
#[derive(Debug)]
pub struct Shop {
    /// Index into [`super::orders::SHOPS`].
    pub number: usize,
    year: Year,
    orders: BTreeMap<Place, Entry>,
    /// Orders made since the start, oldest first; some may be deleted by now.
    made: VecDeque<Place>,
    /// Every deleted order: none of them may come back.
    gone: HashSet<ObjectId>,
    gone_lately: VecDeque<ObjectId>,
    /// Orders whose last write has an unknown outcome.
    uncertain: HashSet<ObjectId>,
}

impl Shop {
    /// Empty books.
    pub fn new(number: usize, year: Year) -> Self {
        Self {
            number,
            year,
            orders: BTreeMap::new(),
            made: VecDeque::new(),
            gone: HashSet::new(),
            gone_lately: VecDeque::new(),
            uncertain: HashSet::new(),
        }
    }

    /// Enters order `i` of the sample year.
    pub fn enter_sample(&mut self, i: u64, order: &Order) {
        self.orders.insert(Place { created: order.created, id: order.id }, Entry::Sample(i));
    }

    /// The newest order but `back` of them.
    pub fn newest(&self, back: usize) -> Option<Place> {
        self.orders.keys().rev().nth(back).copied()
    }

    /// The first order at or after a moment.
    pub fn first_from(&self, created: i64) -> Option<Place> {
        let from = Place { created, id: ObjectId::from_bytes([0; 12]) };
        self.orders.range(from..).next().map(|(place, _)| *place)
    }

    /// The order there, as it should be.
    pub fn order(&self, place: Place) -> Option<Order> {
        self.orders.get(&place).map(|entry| self.read(entry))
    }

    fn read(&self, entry: &Entry) -> Order {
        match entry {
            Entry::Sample(i) => self.year.order(*i),
            Entry::Changed(order) => (**order).clone(),
        }
    }

    /// The orders made in `[from, to)`, newest first, `most` of them.
    pub fn newest_between(&self, from: i64, to: i64, most: usize) -> Vec<Order> {
        let at = |created| Place { created, id: ObjectId::from_bytes([0; 12]) };
        let found = self.orders.range(at(from)..at(to)).rev().take(most);
        found.map(|(_, entry)| self.read(entry)).collect()
    }

    /// How many orders were made from that moment on.
    pub fn count_from(&self, from: i64) -> usize {
        self.orders.range(Place { created: from, id: ObjectId::from_bytes([0; 12]) }..).count()
    }

    /// The oldest order made since the start, if there are more than `most` of them.
    pub fn surplus(&mut self, most: usize) -> Option<Place> {
        while self.made.len() > most {
            let oldest = self.made.pop_front()?;
            if self.orders.contains_key(&oldest) {
                return Some(oldest);
            }
        }
        None
    }

    /// A deleted order.
    pub fn gone(&self, which: usize) -> Option<ObjectId> {
        let count = self.gone_lately.len().max(1);
        self.gone_lately.get(which % count).copied()
    }

    /// A new order is acknowledged.
    pub fn made(&mut self, order: Order) {
        let place = Place { created: order.created, id: order.id };
        self.made.push_back(place);
        self.orders.insert(place, Entry::Changed(Box::new(order)));
    }

    /// A change is acknowledged.
    pub fn changed(&mut self, order: Order) {
        let place = Place { created: order.created, id: order.id };
        self.orders.insert(place, Entry::Changed(Box::new(order)));
    }

    /// A deletion is acknowledged.
    pub fn deleted(&mut self, place: Place) {
        self.orders.remove(&place);
        self.gone.insert(place.id);
        self.gone_lately.push_back(place.id);
        if self.gone_lately.len() > GONE_REMEMBERED {
            self.gone_lately.pop_front();
        }
    }

    /// A write ended in an error: the order may be as it was, or as it was to be.
    pub fn unknown(&mut self, place: Place) {
        self.orders.remove(&place);
        self.uncertain.insert(place.id);
    }

    /// Whether lists can be checked: every order's state is known.
    pub fn is_certain(&self) -> bool {
        self.uncertain.is_empty()
    }

    /// Whether an order was deleted.
    pub fn is_gone(&self, id: &ObjectId) -> bool {
        self.gone.contains(id)
    }

    /// Whether nobody can know an order's state.
    pub fn is_uncertain(&self, id: &ObjectId) -> bool {
        self.uncertain.contains(id)
    }

    /// Every order's place.
    pub fn places(&self) -> impl Iterator<Item = Place> {
        self.orders.keys().copied()
    }
}

/// The bytes an order should have on a server.
pub fn bytes_of(order: &Order) -> Option<RawDocumentBuf> {
    RawDocumentBuf::try_from(&order.document).ok()
}

#[cfg(test)]
mod tests {
    use bson::DateTime;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    fn shop() -> Shop {
        let now = DateTime::from_millis(1_800_000_000_000);
        Shop::new(0, Year::ending(now, std::time::Duration::from_secs(1000), 10_000))
    }

    fn order(created: i64) -> Order {
        Order::new(&mut StdRng::seed_from_u64(1), ObjectId::new(), 0, created, 1)
    }

    #[test]
    fn lists_are_by_date_newest_first_and_half_open() {
        let mut shop = shop();
        for created in [10, 20, 30, 40] {
            shop.made(order(created));
        }
        let listed = |shop: &Shop, from, to, most| -> Vec<i64> {
            shop.newest_between(from, to, most).iter().map(|o| o.created).collect()
        };
        assert_eq!(listed(&shop, 20, 40, 10), [30, 20]);
        assert_eq!(listed(&shop, 0, 100, 3), [40, 30, 20]);
        assert_eq!((shop.count_from(30), shop.first_from(11).unwrap().created), (2, 20));
    }

    #[test]
    fn what_is_deleted_is_remembered_and_no_longer_surplus() {
        let mut shop = shop();
        for created in [10, 20, 30] {
            shop.made(order(created));
        }
        let first = shop.first_from(0).unwrap();
        shop.deleted(first);
        assert!(shop.is_gone(&first.id) && shop.gone(17) == Some(first.id));
        assert_eq!(shop.surplus(1).unwrap().created, 20);
        assert_eq!(shop.surplus(1), None);
    }

    #[test]
    fn an_unknown_outcome_makes_lists_uncheckable() {
        let mut shop = shop();
        shop.made(order(10));
        let place = shop.first_from(0).unwrap();
        assert!(shop.is_certain());
        shop.unknown(place);
        assert!(!shop.is_certain() && shop.is_uncertain(&place.id));
        assert_eq!(shop.places().count(), 0);
    }
}
