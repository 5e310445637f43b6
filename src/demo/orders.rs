//! Sample orders: what one looks like, and a year of them that is the same in every run but for the
//! moment it ends. Who keeps or changes them is not here.

use std::time::Duration;

use bson::oid::ObjectId;
use bson::{Bson, DateTime, Decimal128, Document, doc};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// Makes every run's orders the same.
const SEED: u64 = 0x4861_6c6f_636c_696e;
/// How far back the sample reaches.
const YEAR: Duration = Duration::from_secs(365 * DAY_SECONDS);
const DAY_SECONDS: u64 = 24 * 60 * 60;
const DAY_MILLIS: i64 = 24 * 60 * 60 * 1000;
/// Just inside the window's edge lies the busiest hour of the year, so that orders leave the window
/// all the time while one watches.
const SALE_ORDERS: u64 = 7200;
/// Between two orders of that hour.
const SALE_INTERVAL_MILLIS: i64 = 500;
/// Fewer would leave nothing outside the sale.
pub const LEAST_ORDERS: u64 = SALE_ORDERS + 1000;
/// What an ObjectId's counter can tell apart.
pub const MOST_ORDERS: u64 = 1 << 23;
/// An order's history is cut to its newest events, so that none grows for ever.
const MOST_EVENTS: i32 = 12;

/// The shops that sell; each order belongs to one.
pub const SHOPS: [&str; 8] =
    ["Bergen", "Gdynia", "Lisboa", "Marseille", "Piran", "Rostock", "Tallinn", "Valletta"];

const PRODUCTS: [(&str, &str, &str); 16] = [
    ("ANC-010", "Anchor shackle, galvanised", "14.90"),
    ("BAR-002", "Aneroid barometer", "89.00"),
    ("BIN-750", "Binoculars 7x50", "219.00"),
    ("CHT-114", "Chart, Bay of Biscay", "27.50"),
    ("CMP-003", "Steering compass", "164.00"),
    ("CTD-900", "Conductivity probe", "1290.00"),
    ("FEN-020", "Fender, 20 cm", "31.25"),
    ("LED-012", "Navigation light, red", "42.80"),
    ("LIN-112", "Mooring line, 12 mm, 10 m", "38.40"),
    ("LOG-200", "Log book, waterproof", "18.00"),
    ("NAN-005", "Nansen bottle, 1.7 l", "640.00"),
    ("PMP-024", "Bilge pump, 24 V", "76.10"),
    ("SAI-330", "Sailcloth, the metre", "22.95"),
    ("SEC-030", "Secchi disk, 30 cm", "54.00"),
    ("SXT-001", "Sextant", "410.00"),
    ("TMP-150", "Reversing thermometer", "133.70"),
];
const FIRST_NAMES: [&str; 16] = [
    "Ada", "Bruno", "Chiara", "Dmitri", "Eva", "Farid", "Greta", "Hugo", "Inês", "Jonas", "Kirsi",
    "Luka", "Maja", "Nils", "Olga", "Paweł",
];
const LAST_NAMES: [&str; 16] = [
    "Almeida",
    "Berg",
    "Castellan",
    "Dahl",
    "Engström",
    "Ferreira",
    "Grech",
    "Hansen",
    "Ilves",
    "Jansen",
    "Kovač",
    "Lund",
    "Moreau",
    "Nowak",
    "Oja",
    "Petersen",
];
const STREETS: [&str; 8] = [
    "Harbour Road",
    "Quay Street",
    "Mole",
    "Lighthouse Lane",
    "Ropewalk",
    "Customs Square",
    "Dock Road",
    "Pilot Street",
];
const METHODS: [&str; 4] = ["card", "transfer", "invoice", "wallet"];
const CARRIERS: [&str; 3] = ["Albatross", "Northpost", "Tern Express"];

/// A year of orders that ends now. Order `i` is made anew whenever it is asked for, so that the
/// whole year need not be kept to know what each should look like.
#[derive(Debug, Clone, Copy)]
pub struct Year {
    /// Milliseconds since 1970.
    ends: i64,
    keep: i64,
    orders: u64,
}

impl Year {
    /// `orders` orders, [`LEAST_ORDERS`] or more, before `now`; those of the sale age beyond `keep`
    /// one after another from now on.
    pub fn ending(now: DateTime, keep: Duration, orders: u64) -> Self {
        let orders = orders.clamp(LEAST_ORDERS, MOST_ORDERS);
        Self { ends: now.timestamp_millis(), keep: millis(keep), orders }
    }

    /// How many orders.
    pub fn len(&self) -> u64 {
        self.orders
    }

    /// The year's first moment, in milliseconds since 1970.
    pub fn begins(&self) -> i64 {
        self.ends - millis(YEAR)
    }

    /// Where the window began when the year was made.
    pub fn edge(&self) -> i64 {
        self.ends - self.keep
    }

    /// Order `i`, with its place.
    pub fn order(&self, i: u64) -> Order {
        let mut random = StdRng::seed_from_u64(SEED ^ i);
        let ordinary = self.orders - SALE_ORDERS;
        let created = if i < ordinary {
            // Trade grew all year: twice as much of it at the end as on average.
            let part = (i as f64 + random.random::<f64>()) / ordinary as f64;
            self.begins() + (part.sqrt() * millis(YEAR) as f64) as i64
        } else {
            self.edge() + (i - ordinary) as i64 * SALE_INTERVAL_MILLIS
        };
        let shop = random.random_range(0..SHOPS.len());
        let id = sample_id(created, shop, i);
        let mut order = Order::new(&mut random, id, shop, created, i);
        order.live_through(&mut random, self.ends - created);
        order
    }
}

/// Ids as the shops' own clients would have made them: the second, five bytes of the process, a
/// counter.
fn sample_id(created: i64, shop: usize, i: u64) -> ObjectId {
    let seconds = u32::try_from(created / 1000).unwrap_or_default();
    let process = [b'd', b'e', b'm', b'o', shop as u8];
    let [.., a, b, c] = i.to_be_bytes();
    ObjectId::from_parts(seconds, process, [a, b, c])
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// One order, as the shop that made it knows it.
#[derive(Debug, Clone, PartialEq)]
pub struct Order {
    /// Index into [`SHOPS`].
    pub shop: usize,
    /// When it was made, in milliseconds since 1970.
    pub created: i64,
    /// Its `_id`.
    pub id: ObjectId,
    /// The whole document.
    pub document: Document,
}

impl Order {
    /// A new order. `number` is what the shop's staff would call it by.
    pub fn new(
        random: &mut impl Rng,
        id: ObjectId,
        shop: usize,
        created: i64,
        number: u64,
    ) -> Self {
        let shop_name = SHOPS.get(shop).copied().unwrap_or_default();
        let first = pick(random, &FIRST_NAMES, "");
        let last = pick(random, &LAST_NAMES, "");
        let customer = random.random_range(1..40_000);
        let at = DateTime::from_millis(created);
        let document = doc! {
            "_id": id,
            "number": format!("HX-{number:07}"),
            "store": shop_name,
            "created_at": at,
            "updated_at": at,
            "status": "new",
            "revision": 1,
            "customer": {
                "id": customer,
                "name": format!("{first} {last}"),
                "email": format!("{}.{customer}@example.com", first.to_lowercase()),
                "loyalty": random.random_bool(0.3),
            },
            "items": items(random),
            "currency": "EUR",
            "payment": {
                "method": pick(random, &METHODS, "card"),
                "reference": bson::Binary {
                    subtype: bson::spec::BinarySubtype::Uuid,
                    bytes: random.random::<[u8; 16]>().to_vec(),
                },
            },
            "shipping": {
                "carrier": pick(random, &CARRIERS, "Northpost"),
                "address": {
                    "street": format!("{} {}", pick(random, &STREETS, "Mole"), random.random_range(1..180)),
                    "postcode": format!("{:05}", random.random_range(1000..99_999)),
                    "city": shop_name,
                },
                "weight_kg": (random.random_range(1..400) as f64) / 10.0,
            },
            "gift": random.random_bool(0.08),
            "note": if random.random_bool(0.1) { Bson::from("Please ring at the harbour office") } else { Bson::Null },
            "events": [{ "at": at, "what": "new" }],
        };
        Self { shop, created, id, document }
    }

    /// What an order of that age has been through.
    fn live_through(&mut self, random: &mut impl Rng, age_millis: i64) {
        let stages = [(0.02, "paid"), (1.0, "shipped"), (4.0, "delivered")];
        for (days, what) in stages {
            let after = (days * DAY_MILLIS as f64 * random.random_range(0.5..1.5)) as i64;
            if after < age_millis {
                self.advance(what, self.created + after);
            }
        }
    }

    /// The order's own idea of what [`advance_update`] makes of it.
    pub fn advance(&mut self, what: &str, at: i64) {
        let at = DateTime::from_millis(at);
        self.document.insert("status", what);
        self.document.insert("updated_at", at);
        let revision = self.document.get_i32("revision").unwrap_or_default();
        self.document.insert("revision", revision + 1);
        if let Ok(events) = self.document.get_array_mut("events") {
            events.push(Bson::from(doc! { "at": at, "what": what }));
            let excess = events.len().saturating_sub(MOST_EVENTS as usize);
            events.drain(..excess);
        }
    }
}

/// The update that takes an order to its next state.
pub fn advance_update(what: &str, at: i64) -> Document {
    let at = DateTime::from_millis(at);
    doc! {
        "$set": { "status": what, "updated_at": at },
        "$inc": { "revision": 1 },
        "$push": { "events": { "$each": [{ "at": at, "what": what }], "$slice": -MOST_EVENTS } },
    }
}

fn items(random: &mut impl Rng) -> Vec<Document> {
    (0..random.random_range(1..=5))
        .map(|_| {
            let (sku, name, price) =
                pick(random, &PRODUCTS, ("ANC-010", "Anchor shackle", "14.90"));
            doc! {
                "sku": sku,
                "name": name,
                "quantity": random.random_range(1..=4),
                "price": price.parse::<Decimal128>().map_or(Bson::Null, Bson::from),
            }
        })
        .collect()
}

fn pick<T: Copy>(random: &mut impl Rng, among: &[T], otherwise: T) -> T {
    among.choose(random).copied().unwrap_or(otherwise)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn year() -> Year {
        let now = DateTime::from_millis(1_800_000_000_000);
        Year::ending(now, Duration::from_secs(30 * DAY_SECONDS), 20_000)
    }

    #[test]
    fn a_year_is_the_same_whenever_it_is_made() {
        for i in [0, 7, 12_799, 12_800, 19_999] {
            assert_eq!(year().order(i), year().order(i));
        }
    }

    #[test]
    fn every_order_has_its_own_id_and_lies_in_the_year() {
        let year = year();
        let mut ids = HashSet::new();
        for i in 0..year.len() {
            let order = year.order(i);
            assert!(order.created >= year.begins() && order.created <= year.ends, "{order:?}");
            assert!(ids.insert(order.id), "{order:?}");
        }
    }

    #[test]
    fn orders_leave_the_window_from_the_first_second_on() {
        let year = year();
        let leaving = |seconds: i64| {
            (0..year.len())
                .map(|i| year.order(i).created - year.edge())
                .filter(|inside| (0..seconds * 1000).contains(inside))
                .count()
        };
        assert!(leaving(5) >= 10);
        assert!(leaving(3600) >= 7200);
    }

    #[test]
    fn history_is_bounded() {
        let mut order = year().order(3);
        for step in 0..100 {
            order.advance("checked", step);
        }
        assert_eq!(order.document.get_array("events").unwrap().len(), MOST_EVENTS as usize);
    }
}
