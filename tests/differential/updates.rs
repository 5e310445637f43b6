//! Random updates: operators, on arrays too, replacements, pipelines. Operators that can fail on some
//! documents only are kept to single documents: which documents come before the one that fails is
//! nobody's promise.

use bson::{Bson, Document, doc};

use super::values::Dice;

/// An update and the `arrayFilters` it needs.
pub struct Update {
    pub update: Bson,
    pub array_filters: Option<Vec<Document>>,
}

impl Dice {
    /// An update of one document, or of many.
    pub fn update(&mut self, many: bool, upsert: bool) -> Update {
        let update = match self.below(20) {
            0..2 if !many => return self.replacement().into(),
            2..5 => return Bson::Array(self.pipeline(upsert)).into(),
            5 => {
                let update =
                    doc! { "$set": { "items.$[hit].q": self.below(10) }, "$inc": { "v": 1 } };
                let filters = vec![doc! { "hit.k": self.below(4) }];
                // On a document without the array, which an upsert would make, it fails.
                if upsert || many {
                    self.operators(many, upsert)
                } else {
                    return Update { update: update.into(), array_filters: Some(filters) };
                }
            }
            _ => self.operators(many, upsert),
        };
        Bson::Document(update).into()
    }

    /// A whole new document, without an `_id`.
    pub fn replacement(&mut self) -> Bson {
        Bson::Document(self.fields())
    }

    fn pipeline(&mut self, upsert: bool) -> Vec<Bson> {
        let n = self.serial();
        let mut stages = match self.below(7) {
            0 => vec![
                doc! { "$set": { "x": { "$mod": [{ "$add": [{ "$ifNull": ["$x", 0] }, 1] }, 6] } } },
            ],
            1 => vec![doc! { "$set": { "tags": { "$slice": [{ "$ifNull": ["$tags", []] }, 1] } } }],
            2 => vec![doc! { "$unset": ["s", "sub.q"] }, doc! { "$set": { "s": "set" } }],
            3 => vec![doc! { "$set": { "at": self.date().unwrap_or(Bson::Null) } }],
            // What `_id` an upsert of this would make, only running it tells.
            4 if !upsert => vec![
                doc! { "$replaceWith": { "$mergeObjects": ["$$ROOT", { "sub": { "p": self.below(5) } }] } },
            ],
            5 => vec![
                doc! { "$set": { "copy": { "$literal": { "$x": 1, "a.b": 2 } }, "10": "ten" } },
            ],
            _ => vec![
                doc! { "$set": { "sub": { "p": { "$add": [{ "$ifNull": ["$sub.p", 0] }, 1] } }, "old": "$s" } },
            ],
        };
        stages.push(doc! { "$set": {
            "v": { "$add": [{ "$ifNull": ["$v", 0] }, 1] },
            "n": { "$ifNull": ["$n", n] },
        } });
        stages.into_iter().map(Bson::Document).collect()
    }

    fn operators(&mut self, many: bool, upsert: bool) -> Document {
        let mut update = match self.below(24) {
            0..3 => doc! { "$set": { "x": self.below(6) } },
            3..6 => match self.date() {
                Some(at) => doc! { "$set": { "at": at } },
                None => doc! { "$unset": { "at": "" } },
            },
            6 => doc! { "$set": { "sub.p": self.below(5), "s": self.word() } },
            7 => doc! { "$push": { "tags": self.below(6) } },
            8 => {
                doc! { "$push": { "tags": { "$each": [self.below(6), self.below(6)], "$sort": 1, "$slice": -3 } } }
            }
            9 => doc! { "$push": { "items": { "$each": [self.item()], "$position": 0 } } },
            10 => doc! { "$addToSet": { "tags": { "$each": [self.below(6), self.below(6)] } } },
            11 => doc! { "$pull": { "tags": { "$gte": self.below(6) } } },
            12 => doc! { "$pull": { "items": { "k": self.below(4) } } },
            13 => doc! { "$pullAll": { "tags": [self.below(6), self.below(6)] } },
            14 => doc! { "$pop": { "tags": self.pick(&[1, -1]) } },
            15 => doc! { "$inc": { "y": self.number() } },
            16 => doc! { "$mul": { "y": -1 } },
            17 => doc! { "$min": { "sub.p": self.below(5) }, "$max": { "x": self.below(6) } },
            18 => doc! { "$bit": { "x": { "xor": 1 } } },
            19 => doc! { "$rename": { "s": "t" } },
            20 => doc! { "$unset": { "sub.q": "", "odd": "" } },
            21 if !many && !upsert => doc! { "$set": { "items.$[].q": self.below(10) } },
            // Fails on some documents.
            22 if !many => {
                let failing = [
                    doc! { "$inc": { "s": 1 } },
                    doc! { "$push": { "x": 1 } },
                    doc! { "$set": { "x.y.z": 1 } },
                    doc! { "$set": { "_id": self.id() } },
                    doc! { "$set": { "tags.1": 9 } },
                ];
                self.pick(&failing)
            }
            _ => doc! { "$set": { "touched": true } },
        };
        if self.percent(70) {
            let mut counts = update.get_document("$inc").cloned().unwrap_or_default();
            counts.insert("v", 1);
            update.insert("$inc", counts);
        }
        if upsert {
            let mut born = doc! { "n": self.serial() };
            for (name, value) in [("tags", Bson::Array(vec![])), ("items", Bson::Array(vec![]))] {
                if !mentions(&update, name) {
                    born.insert(name, value);
                }
            }
            if self.percent(50)
                && !mentions(&update, "at")
                && let Some(at) = self.date()
            {
                born.insert("at", at);
            }
            update.insert("$setOnInsert", born);
        }
        update
    }
}

/// Whether some operator touches a field or what is below it.
fn mentions(update: &Document, field: &str) -> bool {
    update
        .values()
        .filter_map(Bson::as_document)
        .flat_map(Document::keys)
        .any(|path| path.split('.').next() == Some(field))
}

impl From<Bson> for Update {
    fn from(update: Bson) -> Self {
        Self { update, array_filters: None }
    }
}
