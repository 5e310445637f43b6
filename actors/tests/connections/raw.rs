//! A client that speaks in bytes.
#![allow(dead_code)] // every test binary uses a part of it

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use bson::raw::RawDocumentBuf;
use bson::{Document, doc};
use bytes::{Bytes, BytesMut};
use halocline_wire::{Frame, Header, Limits, MsgFlags, OpMsg, encode_msg};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// One OP_MSG request.
pub fn request(request_id: i32, flags: MsgFlags, document: Document) -> Bytes {
    let raw = RawDocumentBuf::try_from(&document).unwrap();
    let mut out = BytesMut::new();
    encode_msg(request_id, 0, flags, &raw, &[], &mut out);
    out.freeze()
}

/// A message of any opcode.
pub fn message(request_id: i32, op_code: i32, body: &[u8]) -> Bytes {
    let header = Header { length: 16 + body.len(), request_id, response_to: 0, op_code };
    let mut out = BytesMut::from(&header.encode()[..]);
    out.extend_from_slice(body);
    out.freeze()
}

/// An OP_QUERY of a command.
pub fn query(request_id: i32, namespace: &str, document: Document) -> Bytes {
    let mut body = vec![0; 4];
    body.extend_from_slice(namespace.as_bytes());
    body.push(0);
    body.extend_from_slice(&0_i32.to_le_bytes());
    body.extend_from_slice(&(-1_i32).to_le_bytes());
    body.extend_from_slice(RawDocumentBuf::try_from(&document).unwrap().as_bytes());
    message(request_id, 2004, &body)
}

/// A reply as it came.
pub struct Reply {
    pub header: Header,
    pub bytes: Bytes,
}

impl Reply {
    /// An OP_MSG's flags; also checks its checksum.
    pub fn flags(&self) -> MsgFlags {
        self.msg().flags()
    }

    fn msg(&self) -> OpMsg {
        let frame = Frame { header: self.header, bytes: self.bytes.clone() };
        OpMsg::parse(frame, &Limits::SERVER).unwrap()
    }

    pub fn document(&self) -> Document {
        match self.header.op_code {
            2013 => Document::try_from(self.msg().body()).unwrap(),
            1 => {
                let body = RawDocumentBuf::from_bytes(self.bytes[36..].to_vec()).unwrap();
                Document::try_from(body.as_ref()).unwrap()
            }
            other => panic!("opcode {other} has no document"),
        }
    }
}

/// A client connection.
pub struct Raw {
    pub socket: TcpStream,
    next_request: i32,
}

impl Raw {
    pub async fn connect(address: SocketAddr) -> Self {
        let socket = TcpStream::connect(address).await.unwrap();
        socket.set_nodelay(true).unwrap();
        Self { socket, next_request: 100 }
    }

    pub async fn send(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).await.unwrap();
    }

    /// The next message, or `None` if the server has closed the connection.
    pub async fn receive(&mut self) -> Option<Reply> {
        let mut head = [0; 16];
        match self.socket.read_exact(&mut head).await {
            Ok(_) => {}
            Err(error)
                if [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset]
                    .contains(&error.kind()) =>
            {
                return None;
            }
            Err(error) => panic!("{error}"),
        }
        let header = Header::parse(&head, usize::MAX).unwrap().unwrap();
        let mut bytes = head.to_vec();
        bytes.resize(header.length, 0);
        self.socket.read_exact(&mut bytes[16..]).await.unwrap();
        Some(Reply { header, bytes: bytes.into() })
    }

    pub async fn closed(&mut self) {
        if let Some(reply) = self.receive().await {
            panic!("a reply instead of the end: {:?}", reply.header);
        }
    }

    /// Runs a command and returns its reply's document.
    pub async fn command(&mut self, mut document: Document) -> Document {
        document.insert("$db", "admin");
        self.next_request += 1;
        let request_id = self.next_request;
        self.send(&request(request_id, MsgFlags::NONE, document)).await;
        let reply = self.receive().await.expect("a reply");
        assert_eq!(reply.header.response_to, request_id);
        reply.document()
    }

    pub async fn ping(&mut self) {
        assert_eq!(self.command(doc! { "ping": 1 }).await, doc! { "ok": 1.0 });
    }

    /// Whether nothing comes for a while. Only ever used to show that something wrong stays away.
    pub async fn is_silent(&mut self) -> bool {
        let mut byte = [0; 1];
        let peek = self.socket.peek(&mut byte);
        tokio::time::timeout(Duration::from_millis(100), peek).await.is_err()
    }
}
