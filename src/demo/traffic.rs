//! The shops at work: each makes, changes, looks up and deletes its own orders through Halocline and
//! checks every answer against its own books.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use bson::oid::ObjectId;
use bson::raw::RawDocumentBuf;
use bson::{Document, doc};
use mongodb::options::{ClientOptions, ReturnDocument};
use mongodb::{Client, Collection, Database};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use super::orders::{Order, SHOPS, Year, advance_update};
use super::shop::{Place, Shop, bytes_of};
use super::{COLLECTION, DATABASE, DATE_FIELD};

/// Longest wait for one answer: somewhat more than the daemon itself lets an operation wait.
const PATIENCE: Duration = Duration::from_secs(40);
/// Orders a shop looks at again and again.
const RECENT: usize = 400;
/// Orders on a page of a list.
const PAGE: usize = 50;
/// Orders in a report, which is read in several batches.
const REPORT: usize = 150;
/// Documents a batch of a report.
const REPORT_BATCH: u32 = 40;
/// Orders a shop makes before each new one replaces its oldest, so that a demo left alone for days
/// fills neither disk nor memory.
const MOST_MADE: usize = 5000;
/// Complaints that are kept word by word.
const MOST_COMPLAINTS: usize = 5;
/// How much of each.
const COMPLAINT_CHARACTERS: usize = 2000;
const HOUR_MILLIS: i64 = 60 * 60 * 1000;
const DAY_MILLIS: i64 = 24 * HOUR_MILLIS;

/// What the shops have done so far.
#[derive(Debug, Default)]
pub struct Tally {
    /// Operations answered.
    pub done: Cell<u64>,
    /// Operations that ended in an error.
    pub failed: Cell<u64>,
    /// Answers that were not what the acknowledged writes make them.
    pub wrong: Cell<u64>,
    /// The first errors and wrong answers, in words.
    pub complaints: RefCell<Vec<String>>,
}

impl Tally {
    fn complain(&self, what: &str) {
        let mut complaints = self.complaints.borrow_mut();
        if complaints.len() < MOST_COMPLAINTS {
            complaints.push(what.chars().take(COMPLAINT_CHARACTERS).collect());
        }
    }
}

/// The shops' clients at work.
pub struct Traffic {
    /// What they have done so far.
    pub tally: Rc<Tally>,
    stop: watch::Sender<bool>,
    workers: Vec<tokio::task::JoinHandle<Shop>>,
}

impl Traffic {
    /// Opens the shops. Together they do `rate` operations a second. Must be called on a thread that
    /// runs local tasks.
    pub async fn start(
        connection_string: &str,
        shops: Vec<Shop>,
        year: Year,
        rate: f64,
    ) -> anyhow::Result<Self> {
        let mut options = ClientOptions::parse(connection_string).await?;
        options.app_name = Some("halocline-demo".into());
        let client = Client::with_options(options)?;
        let (stop, stopping) = watch::channel(false);
        let tally = Rc::new(Tally::default());
        let interval = Duration::from_secs_f64(shops.len() as f64 / rate);
        let workers = shops
            .into_iter()
            .map(|shop| {
                let worker = Worker::new(&client, shop, year, tally.clone());
                tokio::task::spawn_local(worker.run(interval, stopping.clone()))
            })
            .collect();
        Ok(Self { tally, stop, workers })
    }

    /// Whether a worker has ended by itself, which only a bug in it can bring about.
    pub fn is_broken(&self) -> bool {
        self.workers.iter().any(tokio::task::JoinHandle::is_finished)
    }

    /// Lets every operation under way finish and returns the shops' books.
    pub async fn stop(self) -> anyhow::Result<Vec<Shop>> {
        // No receiver is left only if every worker is gone, which the loop finds out.
        let _ = self.stop.send(true);
        let mut shops = Vec::new();
        for worker in self.workers {
            shops.push(worker.await?);
        }
        Ok(shops)
    }
}

/// Makes one more order when the shops have closed, and enters it in the books of one: what was done
/// before it is mirrored no later than it is known to the feeder.
pub async fn make_last_order(
    connection_string: &str,
    shop: &mut Shop,
    year: Year,
) -> anyhow::Result<ObjectId> {
    let client = Client::with_uri_str(connection_string).await?;
    let orders = client.database(DATABASE).collection::<RawDocumentBuf>(COLLECTION);
    let random = &mut StdRng::seed_from_u64(year.len());
    let order = Order::new(random, ObjectId::new(), shop.number, now(), 0);
    let id = order.id;
    orders.insert_one(bytes_of(&order).context("the last order is not BSON")?).await?;
    shop.made(order);
    Ok(id)
}

/// What a worker can do, with how often it does so, in parts of a thousand.
const MIX: [(Act, u32); 13] = [
    (Act::ReadRecent, 380),
    (Act::ListPage, 120),
    (Act::ListReport, 30),
    (Act::CountRecent, 40),
    (Act::Make, 110),
    (Act::Change, 150),
    (Act::ChangeAndFetch, 40),
    (Act::Cancel, 30),
    (Act::ReadOld, 50),
    (Act::ReadGone, 15),
    (Act::ListOldDay, 10),
    (Act::ChangeOld, 20),
    (Act::DeleteOld, 5),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    ReadRecent,
    ListPage,
    ListReport,
    CountRecent,
    Make,
    Change,
    ChangeAndFetch,
    Cancel,
    ReadOld,
    ReadGone,
    ListOldDay,
    ChangeOld,
    DeleteOld,
}

fn choose(random: &mut impl Rng) -> Act {
    let mut left = random.random_range(0..MIX.iter().map(|(_, share)| share).sum());
    for (act, share) in MIX {
        if left < share {
            return act;
        }
        left -= share;
    }
    Act::ReadRecent
}

/// Why an operation did not end as it should.
enum Trouble {
    /// The driver's error, or none in time.
    Failed(String),
    /// The answer contradicts what was acknowledged.
    Wrong(String),
}

type Done = Result<(), Trouble>;

fn wrong(what: impl Into<String>) -> Trouble {
    Trouble::Wrong(what.into())
}

/// Waits for an answer, but not for ever.
async fn answer<T>(
    operation: impl IntoFuture<Output = mongodb::error::Result<T>>,
) -> Result<T, Trouble> {
    match tokio::time::timeout(PATIENCE, operation.into_future()).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(Trouble::Failed(error.to_string())),
        Err(_) => Err(Trouble::Failed(format!("no answer within {} s", PATIENCE.as_secs()))),
    }
}

struct Worker {
    database: Database,
    orders: Collection<RawDocumentBuf>,
    shop: Shop,
    year: Year,
    random: StdRng,
    tally: Rc<Tally>,
    /// The next order's number.
    number: u64,
    /// When the last order was made: each is made at a moment of its own.
    last_made: i64,
}

impl Worker {
    fn new(client: &Client, shop: Shop, year: Year, tally: Rc<Tally>) -> Self {
        let database = client.database(DATABASE);
        Self {
            orders: database.collection(COLLECTION),
            database,
            random: StdRng::seed_from_u64(shop.number as u64),
            number: year.len() + shop.number as u64,
            shop,
            year,
            tally,
            last_made: 0,
        }
    }

    async fn run(mut self, interval: Duration, mut stopping: watch::Receiver<bool>) -> Shop {
        // Not all at the same moments.
        let first = interval.mul_f64(self.shop.number as f64 / SHOPS.len() as f64);
        let mut pace = tokio::time::interval_at(tokio::time::Instant::now() + first, interval);
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                // An error means that whoever could stop us is gone.
                _ = stopping.wait_for(|stop| *stop) => return self.shop,
                _ = pace.tick() => {}
            }
            let act = choose(&mut self.random);
            let count = |counter: &Cell<u64>| counter.set(counter.get() + 1);
            count(&self.tally.done);
            let shop = SHOPS.get(self.shop.number).copied().unwrap_or_default();
            match self.act(act).await {
                Ok(()) => {}
                Err(Trouble::Failed(what)) => {
                    count(&self.tally.failed);
                    self.tally.complain(&format!("{shop}, {act:?} failed: {what}"));
                }
                Err(Trouble::Wrong(what)) => {
                    count(&self.tally.wrong);
                    self.tally.complain(&format!("{shop}, {act:?} was answered wrongly: {what}"));
                }
            }
        }
    }

    async fn act(&mut self, act: Act) -> Done {
        match act {
            Act::ReadRecent => match self.recent() {
                Some(place) => self.read(place).await,
                None => Ok(()),
            },
            Act::ListPage => {
                let hours = [1, 6, 24, 72];
                let hours = hours.get(self.random.random_range(0..hours.len())).copied();
                self.list_from(now() - hours.unwrap_or(1) * HOUR_MILLIS, PAGE, None).await
            }
            Act::ListReport => {
                self.list_from(now() - 5 * DAY_MILLIS, REPORT, Some(REPORT_BATCH)).await
            }
            Act::CountRecent => self.count_from(now() - DAY_MILLIS).await,
            Act::Make => match self.shop.surplus(MOST_MADE) {
                Some(oldest) => self.delete(oldest).await,
                None => self.make().await,
            },
            Act::Change => match self.recent() {
                Some(place) => self.change(place).await,
                None => Ok(()),
            },
            Act::ChangeAndFetch => match self.recent() {
                Some(place) => self.change_and_fetch(place).await,
                None => Ok(()),
            },
            Act::Cancel => match self.recent() {
                Some(place) => self.delete(place).await,
                None => Ok(()),
            },
            Act::ReadOld => match self.old() {
                Some(place) => self.read(place).await,
                None => Ok(()),
            },
            Act::ReadGone => match self.shop.gone(self.random.random_range(0..1000)) {
                Some(id) => self.read_gone(id).await,
                None => Ok(()),
            },
            Act::ListOldDay => {
                let from = self.old_moment();
                self.list(from, from + DAY_MILLIS, usize::MAX, None).await
            }
            Act::ChangeOld => match self.old() {
                Some(place) => self.change(place).await,
                None => Ok(()),
            },
            Act::DeleteOld => match self.old() {
                Some(place) => self.delete(place).await,
                None => Ok(()),
            },
        }
    }

    /// A recent order, the newest most often.
    fn recent(&mut self) -> Option<Place> {
        let nearness: f64 = self.random.random();
        self.shop.newest((nearness * nearness * RECENT as f64) as usize)
    }

    fn old(&mut self) -> Option<Place> {
        let moment = self.old_moment();
        self.shop.first_from(moment)
    }

    /// Some moment before the window, with a day to spare.
    fn old_moment(&mut self) -> i64 {
        self.random.random_range(self.year.begins()..self.year.edge() - 2 * DAY_MILLIS)
    }

    fn store(&self) -> &'static str {
        SHOPS.get(self.shop.number).copied().unwrap_or_default()
    }

    async fn read(&mut self, place: Place) -> Done {
        let found = answer(self.orders.find_one(doc! { "_id": place.id })).await?;
        let expected = self.shop.order(place).as_ref().and_then(bytes_of);
        match (found, expected) {
            (Some(found), Some(expected)) if found.as_bytes() == expected.as_bytes() => Ok(()),
            (found, expected) => Err(differs(place.id, found, expected)),
        }
    }

    async fn read_gone(&mut self, id: ObjectId) -> Done {
        match answer(self.orders.find_one(doc! { "_id": id })).await? {
            None => Ok(()),
            Some(_) => Err(wrong(format!("the deleted order {id} was found"))),
        }
    }

    /// This shop's orders of the last hours or days, newest first.
    async fn list_from(&mut self, from: i64, most: usize, batch: Option<u32>) -> Done {
        self.list(from, i64::MAX, most, batch).await
    }

    async fn list(&mut self, from: i64, to: i64, most: usize, batch: Option<u32>) -> Done {
        let mut date = doc! { "$gte": bson::DateTime::from_millis(from) };
        if to < i64::MAX {
            date.insert("$lt", bson::DateTime::from_millis(to));
        }
        let filter = doc! { "store": self.store(), DATE_FIELD: date };
        let mut find = self.orders.find(filter).sort(doc! { DATE_FIELD: -1, "_id": -1 });
        if let Ok(limit) = i64::try_from(most) {
            find = find.limit(limit);
        }
        if let Some(size) = batch {
            find = find.batch_size(size);
        }
        let mut cursor = answer(find).await?;
        let mut found = Vec::new();
        while answer(cursor.advance()).await? {
            found.push(cursor.current().to_owned());
        }
        if !self.shop.is_certain() {
            return Ok(());
        }
        let expected = self.shop.newest_between(from, to, most);
        if found.len() != expected.len() {
            return Err(wrong(format!(
                "{} orders were listed where there are {}",
                found.len(),
                expected.len()
            )));
        }
        for (found, order) in found.into_iter().zip(expected) {
            let expected = bytes_of(&order);
            if expected.as_ref().is_none_or(|bytes| bytes.as_bytes() != found.as_bytes()) {
                return Err(differs(order.id, Some(found), expected));
            }
        }
        Ok(())
    }

    async fn count_from(&mut self, from: i64) -> Done {
        let filter = doc! {
            "store": self.store(),
            DATE_FIELD: { "$gte": bson::DateTime::from_millis(from) },
        };
        let count = doc! { "count": COLLECTION, "query": filter };
        let reply = answer(self.database.run_command(count)).await?;
        let counted = whole(&reply, "n");
        let expected = self.shop.count_from(from) as i64;
        if self.shop.is_certain() && counted != Some(expected) {
            return Err(wrong(format!(
                "{counted:?} orders were counted where there are {expected}"
            )));
        }
        Ok(())
    }

    async fn make(&mut self) -> Done {
        self.last_made = now().max(self.last_made + 1);
        let (id, shop) = (ObjectId::new(), self.shop.number);
        let order = Order::new(&mut self.random, id, shop, self.last_made, self.number);
        self.number += SHOPS.len() as u64;
        let Some(bytes) = bytes_of(&order) else { return Ok(()) };
        match answer(self.orders.insert_one(bytes)).await {
            Ok(_) => {
                self.shop.made(order);
                Ok(())
            }
            Err(trouble) => {
                self.shop.unknown(Place { created: order.created, id });
                Err(trouble)
            }
        }
    }

    /// An order as its next change should leave it, and the update that does it.
    fn next_state(&mut self, place: Place) -> Option<(Order, Document)> {
        const WORDS: [&str; 5] = ["paid", "packed", "shipped", "delivered", "returned"];
        let what = WORDS.get(self.random.random_range(0..WORDS.len())).copied()?;
        let at = now();
        let mut order = self.shop.order(place)?;
        order.advance(what, at);
        Some((order, advance_update(what, at)))
    }

    async fn change(&mut self, place: Place) -> Done {
        let Some((order, update)) = self.next_state(place) else { return Ok(()) };
        let changed = answer(self.orders.update_one(doc! { "_id": place.id }, update)).await;
        self.settle(place, changed, |changed| match changed.matched_count {
            1 => Ok(order),
            n => Err(wrong(format!("an update of {} matched {n} orders", place.id))),
        })
    }

    async fn change_and_fetch(&mut self, place: Place) -> Done {
        let Some((order, update)) = self.next_state(place) else { return Ok(()) };
        let expected = bytes_of(&order);
        let changed = self
            .orders
            .find_one_and_update(doc! { "_id": place.id }, update)
            .return_document(ReturnDocument::After);
        let changed = answer(changed).await;
        self.settle(place, changed, |found| match (found, expected) {
            (Some(found), Some(expected)) if found.as_bytes() == expected.as_bytes() => Ok(order),
            (found, expected) => Err(differs(place.id, found, expected)),
        })
    }

    /// Enters a change in the books, if its answer is as it should be.
    fn settle<T>(
        &mut self,
        place: Place,
        changed: Result<T, Trouble>,
        check: impl FnOnce(T) -> Result<Order, Trouble>,
    ) -> Done {
        match changed.and_then(check) {
            Ok(order) => {
                self.shop.changed(order);
                Ok(())
            }
            Err(trouble) => {
                self.shop.unknown(place);
                Err(trouble)
            }
        }
    }

    async fn delete(&mut self, place: Place) -> Done {
        let deleted = answer(self.orders.delete_one(doc! { "_id": place.id })).await;
        match deleted {
            Ok(deleted) if deleted.deleted_count == 1 => {
                self.shop.deleted(place);
                Ok(())
            }
            Ok(deleted) => {
                self.shop.unknown(place);
                let n = deleted.deleted_count;
                Err(wrong(format!("a delete of {} removed {n} orders", place.id)))
            }
            Err(trouble) => {
                self.shop.unknown(place);
                Err(trouble)
            }
        }
    }
}

fn differs(
    id: ObjectId,
    found: Option<RawDocumentBuf>,
    expected: Option<RawDocumentBuf>,
) -> Trouble {
    wrong(match (found, expected) {
        (None, _) => format!("order {id} was not found"),
        (Some(found), Some(expected)) => {
            format!("order {id} is {found:?} where it should be {expected:?}")
        }
        (Some(_), None) => format!("order {id} was found where there should be none"),
    })
}

/// A count, of whatever number type the server made it.
fn whole(reply: &Document, field: &str) -> Option<i64> {
    let value = reply.get(field)?;
    let real = value.as_f64().map(|n| n as i64);
    value.as_i64().or_else(|| value.as_i32().map(i64::from)).or(real)
}

/// Milliseconds since 1970.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mix_adds_up_and_every_act_is_met() {
        assert_eq!(MIX.iter().map(|(_, share)| share).sum::<u32>(), 1000);
        let mut random = StdRng::seed_from_u64(1);
        let chosen: Vec<Act> = (0..5000).map(|_| choose(&mut random)).collect();
        assert!(MIX.iter().all(|(act, _)| chosen.contains(act)));
    }
}
