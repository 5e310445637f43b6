//! Random filters: by `_id`, by a number that one document has, around the boundary, by anything.

use bson::{Bson, Document, Regex, doc};

use super::step::date;
use super::values::{DAY, Dice, MINUTE, SECOND};

/// How many documents a filter can match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Breadth {
    /// One at most.
    One,
    /// Several.
    Many,
}

/// A filter, and the command's `let` if it uses variables.
pub struct Filter {
    pub filter: Document,
    pub variables: Option<Document>,
    pub breadth: Breadth,
    /// It names `_id` by equality.
    pub by_id: bool,
}

impl Filter {
    fn new(filter: Document, breadth: Breadth) -> Self {
        Self { filter, variables: None, breadth, by_id: false }
    }
}

impl Dice {
    /// Any filter.
    pub fn filter(&mut self) -> Filter {
        match self.below(20) {
            0..6 => self.by_id(),
            6..8 => Filter::new(doc! { "_id": self.in_ids() }, Breadth::Many),
            8..13 => self.by_date(),
            13 => self.by_number(),
            _ => {
                let filter = self.condition();
                let mut filter = Filter::new(filter, Breadth::Many);
                if self.percent(10) {
                    let x = self.below(6);
                    filter.variables = Some(doc! { "wanted": x });
                    let expression = doc! { "$eq": ["$x", "$$wanted"] };
                    filter.filter = if self.percent(50) {
                        doc! { "$expr": expression }
                    } else {
                        doc! { "$and": [filter.filter, { "$expr": expression }] }
                    };
                }
                filter
            }
        }
    }

    /// A filter that one document matches at most.
    pub fn narrow(&mut self) -> Filter {
        if self.percent(75) { self.by_id() } else { self.by_number() }
    }

    /// By `_id`, alone or with other conditions.
    pub fn by_id(&mut self) -> Filter {
        let id = self.id();
        self.of_id(id)
    }

    fn of_id(&mut self, id: Bson) -> Filter {
        let operator_like =
            id.as_document().is_some_and(|d| d.keys().any(|key| key.starts_with('$')));
        let value = if operator_like { doc! { "$eq": id.clone() }.into() } else { id.clone() };
        let equality = doc! { "_id": value };
        let filter = match self.below(20) {
            0..9 => equality,
            9 => doc! { "_id": { "$eq": id } },
            10 => doc! { "_id": { "$in": [id] } },
            11 => doc! { "$and": [equality] },
            12 => doc! { "$and": [equality, { "x": self.below(6) }] },
            13 => doc! { "v": self.below(2), "$and": [equality] },
            // Compare and set.
            14..17 => {
                let mut filter = equality;
                filter.insert("v", self.below(2));
                filter
            }
            17 => {
                let mut filter = equality;
                filter.insert("at", self.date_condition());
                filter
            }
            18 => {
                let mut filter = equality;
                filter.insert("s", self.word());
                filter
            }
            _ => {
                let mut filter = equality;
                filter.insert("items.k", self.below(4));
                filter
            }
        };
        Filter { by_id: true, ..Filter::new(filter, Breadth::One) }
    }

    fn by_number(&mut self) -> Filter {
        let n = self.known_serial();
        let mut filter = doc! { "n": n };
        if self.percent(20) {
            filter.insert("x", doc! { "$lt": self.below(7) });
        }
        Filter::new(filter, Breadth::One)
    }

    fn in_ids(&mut self) -> Document {
        let mut ids: Vec<Bson> = (0..self.below(6)).map(|_| self.id()).collect();
        if self.percent(20)
            && let Some(first) = ids.first().cloned()
        {
            ids.push(first);
        }
        doc! { "$in": ids }
    }

    /// By date, with or without more.
    pub fn by_date(&mut self) -> Filter {
        let condition = self.date_condition();
        let mut filter = match self.below(10) {
            0 => {
                let other = self.date_condition();
                doc! { "$or": [{ "at": condition }, { "at": other, "x": self.below(6) }] }
            }
            1 => doc! { "$or": [{ "at": condition }, { "x": self.below(6) }] },
            2 => doc! { "$and": [{ "at": condition }, self.condition()] },
            3 => doc! { "$nor": [{ "at": condition }] },
            _ => doc! { "at": condition },
        };
        if self.percent(30) {
            filter.insert("x", self.below(6));
        }
        Filter::new(filter, Breadth::Many)
    }

    /// What may stand beside the date field.
    fn date_condition(&mut self) -> Bson {
        let near = self.near();
        let recent = 3 * MINUTE + i64::from(self.below(50)) * MINUTE;
        let bound = match self.below(3) {
            0 => recent,
            1 => near,
            _ => self.offset(),
        };
        let later = bound + i64::from(self.below(600)) * SECOND;
        match self.below(16) {
            0..4 => doc! { "$gte": date(bound) }.into(),
            4 => doc! { "$gt": date(bound) }.into(),
            5 => doc! { "$lt": date(bound) }.into(),
            6 => doc! { "$lte": date(bound) }.into(),
            7..9 => doc! { "$gte": date(bound), "$lt": date(later) }.into(),
            9 => date(near / 5000 * 5000),
            10 => {
                let dates: Vec<Bson> = (0..3).map(|_| date(self.near() / 5000 * 5000)).collect();
                doc! { "$in": dates }.into()
            }
            11 => doc! { "$ne": date(bound) }.into(),
            12 => doc! { "$exists": self.percent(50) }.into(),
            13 => Bson::Null,
            14 => doc! { "$not": { "$lt": date(bound) } }.into(),
            _ => {
                let other_types: [Bson; 7] = [
                    doc! { "$type": "string" }.into(),
                    doc! { "$type": "array" }.into(),
                    doc! { "$gte": "2024" }.into(),
                    doc! { "$gte": 5 }.into(),
                    doc! { "$gte": Bson::MinKey }.into(),
                    doc! { "$lte": Bson::MaxKey }.into(),
                    doc! { "$elemMatch": { "$gte": date(bound), "$lt": date(later + DAY) } }.into(),
                ];
                self.pick(&other_types)
            }
        }
    }

    /// By any other field.
    pub fn condition(&mut self) -> Document {
        let regex = |pattern: &str, options: &str| {
            Bson::RegularExpression(Regex {
                pattern: pattern.try_into().unwrap(),
                options: options.try_into().unwrap(),
            })
        };
        match self.below(22) {
            0..3 => doc! { "x": self.below(6) },
            3 => doc! { "x": { "$in": [self.below(6), self.below(6)] } },
            4 => doc! { "y": self.number() },
            5 => doc! { "y": { "$gt": self.number() } },
            6 => doc! { "s": self.word() },
            7 => doc! { "s": regex("^a", self.pick(&["", "i"])) },
            8 => doc! { "tags": self.below(6) },
            9 => doc! { "tags": { "$all": [self.below(6), self.below(6)] } },
            10 => doc! { "tags": { "$size": self.below(4) } },
            11 => {
                doc! { "items": { "$elemMatch": { "k": self.below(4), "q": { "$gt": self.below(10) } } } }
            }
            12 => doc! { "sub.p": { "$lte": self.below(5) } },
            13 => doc! { "sub": { "p": self.below(5), "q": { "r": self.below(3) } } },
            14 => doc! { "n": { "$gte": self.known_serial() } },
            15 => {
                let n = self.known_serial();
                doc! { "n": { "$gte": n, "$lt": n + 8 } }
            }
            16 => doc! { "_id": { "$gte": self.id() } },
            17 => doc! { "_id": { "$lt": self.id(), "$ne": self.id() } },
            18 => doc! { "_id": regex("^k", "") },
            19 => doc! { "$or": [{ "_id": self.id() }, { "x": self.below(6), "v": { "$gt": 0 } }] },
            20 => doc! { "missing": Bson::Null, "x": { "$not": { "$gt": self.below(6) } } },
            _ => {
                if self.percent(50) {
                    doc! {}
                } else {
                    doc! { "_id": { "$nin": [self.id(), self.id()] }, "x": { "$mod": [2, 1] } }
                }
            }
        }
    }

    /// A collation that takes different texts for equal.
    pub fn collation(&mut self) -> Document {
        let strength = self.pick(&[1, 2, 3]);
        doc! { "locale": "en", "strength": strength }
    }
}
